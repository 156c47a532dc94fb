"""What any part may use: compiled functions, files, tensors."""
