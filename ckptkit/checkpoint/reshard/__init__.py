"""From any strategy to any other, without model, torch or GPU: what goes over, how it is cut, who
copies it, and when it is a step.
"""
