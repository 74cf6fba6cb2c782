"""The written format: FORMAT.md, the JSON-Schemas and the conformance cases."""
