"""Drawn faces in LFW's layout, as large as its files, where there are no photographs."""
