"""Object servers behind the storage contract: S3, Google Cloud Storage, Azure, any fsspec."""
