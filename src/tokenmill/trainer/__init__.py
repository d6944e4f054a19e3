"""The reference trainer: a store in, a trained model out, and a device that does not wait.

    options.py     what a run is told             presets.py     models by name, as plain numbers
    setup.py       what follows from that here    memory.py      what it takes, and what if too much
    model.py       the model, one file            schedule.py    learning rates
    optimizer.py   AdamW, 8-bit AdamW, clipping   evaluation.py  loss on the split val
    loop.py        Trainer: one step after the other, on any iterable of batches
    metrics.py     numbers that are read when the device has long had them
    checkpoint.py  folders that are whole, or not there
    run.py         all of it together             train.py       `tokenmill.train`

Only train.py, options.py, presets.py and schedule.py can be imported where torch is not installed.
"""
