"""Refused, though it can be done"""
