"""When do two trainings part?"""
