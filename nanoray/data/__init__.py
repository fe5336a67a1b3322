"""Texts, token files, images and streams, and the order in which ranks read them."""
