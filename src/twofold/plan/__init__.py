"""Whether to split, and how: sizing arithmetic and the verdict."""
