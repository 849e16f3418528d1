"""The scheduler process: who runs next, and which KV pages hold what.

    ingest(messages) -> next_batch() -> send ForwardBatch -> commit(StepResult)

==================  ==========================================================================
``scheduler.py``    the algorithm, as one pure step: ``Scheduler.step(messages, now)``
``main.py``         the loop around it: channels, clock, heartbeat
``ingest.py``       what each message does
``batch.py``        which rows run in the next step, and on which pages
``commit.py``       what a StepResult means for each request
``output.py``       what the detokenizer has not been told yet
``admission.py``    does a waiting request fit beside the growth of those that run?
``policy.py``       order of the waiting queue
``preempt.py``      who gives way when pages run out
``pages.py``        page ids and their reference counts
``radix.py``        the prefix cache
``slots.py``        the running requests as numpy columns (the hot path)
==================  ==========================================================================
"""
