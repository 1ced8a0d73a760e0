"""Gradients that are wrong, without a word"""
