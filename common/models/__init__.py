"""The models of the trainers (build.py, gpt.py), and ways to handle any module (modules.py)."""
