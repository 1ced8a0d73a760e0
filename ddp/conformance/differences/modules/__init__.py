"""What modules hold, and ranks that have built different ones

torch compares the number of the parameters, and their shapes. Ours compares names, order, shapes, strides and dtypes of parameters and
buffers, and the wrapper's settings, before anything is sent.
"""
