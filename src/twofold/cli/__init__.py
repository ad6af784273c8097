"""The commands of `twofold`, one file each."""
