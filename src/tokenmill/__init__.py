"""tokenmill turns raw text into packed, checked, memory-mapped training tokens.

Names are loaded when they are first used: `import tokenmill` itself imports nothing heavy.
"""
