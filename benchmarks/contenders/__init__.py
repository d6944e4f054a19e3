"""One small program per thing that is measured: `python -m benchmarks.contenders.<name> JOB`.

They run under other environments than tokenmill's own, so this folder imports nothing of tokenmill
except in `tokenmill_build`. Each starts its clock itself, after its imports: what is in the time is
said at the top of each file.
"""
