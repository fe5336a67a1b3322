"""What a file of weights contains, read without torch: the driver asks for it before any rank starts.

source.py recognises what a path is and returns a Source: the keys of the configuration that the
weights fix, their vocabulary, and the files. checkpoint/foreign.py reads the tensors themselves.
"""
