"""What modules hold, and ranks that have built different ones

In torch's, each rank compares the number and the shapes of its parameters with rank 0's. Ours compares names, order, shapes,
strides and dtypes of parameters and buffers, and the wrapper's settings, before anything is sent.
"""
