"""`manyhosts serve`: a trained model behind HTTP.

The server (`app`, uvicorn) has no torch in it: it checks what comes in (`tensors`), puts requests together (`batching`)
and hands batches to processes that have the model (`workers`, `model_process`). One of those that dies takes no
request with it that would be answered wrongly: what it had gets a 503, and it is started again.
"""
