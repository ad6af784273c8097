"""What is run on the sources, beside the tests."""
