"""Data sets, and torch's loader."""

DECODERS = ("pillow", "simplejpeg", "torchcodec")  # of JPEG files; see dataloading/dataset/decoders.py
