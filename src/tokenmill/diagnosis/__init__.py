"""What starves a training, and what would not: `tokenmill diagnose` and its report.

    sample -> ways, each in a fresh process -> verdicts against what the GPU takes -> words, HTML

The user's own text and tokenizer are timed the ways people do it. The package is called after the
noun because `tokenmill.diagnose` is the function.
"""
