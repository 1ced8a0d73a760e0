"""Data sets that are held in memory, and torch's loader. (Image files are in dataloading/dataset.)"""

DECODERS = ("pillow", "simplejpeg")  # of JPEG files; see dataloading/dataset/decoders.py
