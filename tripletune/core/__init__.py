"""What all other packages stand on; it imports nothing of them."""
