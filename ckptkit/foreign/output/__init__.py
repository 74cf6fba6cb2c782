"""What checkpoints of other programs are made of, file by file; `checkpoint.export` writes them."""
