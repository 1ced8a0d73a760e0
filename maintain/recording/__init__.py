"""Recorded runs, as pages to step through: what each process does, message by message, and the line of source that it executes.

scenes.py    what is recorded: the script, its variants, and which part of the run is shown
record.py    the recorder inside each process: lines of chosen files, and calls of torch with their bytes
events.py    from what was written to lanes of spans
picture.py   the still, an SVG
page.py      the page, with the still, a slider and the source
"""
