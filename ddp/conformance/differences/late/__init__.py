"""Said too late"""
