"""Looks inside models of images: while they train, in pictures, and on a page to explore."""
