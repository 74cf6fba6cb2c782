"""Any strategy in one line.

`spread` has `as_distributed`, and tells what it does: look at the model and the text, decide, cut,
wrap. What it returns is in `distributed`: a model that ranks train together. `options` has the
choices, which are checked before anything changes. The engines are torch's: `data_parallel` wraps
for ddp and fsdp, and shares out the optimizer of zero1; `tensor_parallel` cuts modules by rules;
`pipeline` cuts the model into stages, and has the schedules that run them.
"""

from __future__ import annotations
