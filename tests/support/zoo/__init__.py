"""The models of all tests: named.py has some with a difficulty each, random_models.py draws sequences of layers."""
