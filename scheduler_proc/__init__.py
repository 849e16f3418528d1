"""The scheduler process: who runs next, and which KV pages hold what.

    ingest(messages) -> next_batch() -> send ForwardBatch -> commit(StepResult)

=================  ===========================================================================
``scheduler.py``   the algorithm, as one pure step: ``Scheduler.step(messages, now)``
``main.py``        the loop around it: channels, clock, heartbeat
``request.py``     a request and the statuses it passes through
``life.py``        the one place that changes a status and gives pages back
``state.py``       everything the parts below share
``ingest.py``      what each message of a tokenizer or the detokenizer does; deadlines
``batch.py``       which rows run in the next step (``draft.py``: the batch being put together)
``admit.py``       taking a waiting request in: cached prefix, pages, slot, chunks
``admission.py``   does it fit beside the growth of those that run?
``policy.py``      order of the waiting queue (``queue.py``)
``preempt.py``     who gives way when pages run out
``cost.py``        how large a prefill chunk may be, from what steps were measured to take
``pacing.py``      when the second batch in flight is sent: late, so that newcomers are in it
``commit.py``      what a StepResult means for each request
``output.py``      what the detokenizer has not been told yet
``slots.py``       the running requests as columns: the hot path (``wide.py``: steps of many rows, in numpy)
``pages.py``       page ids and their reference counts
``radix.py``       the prefix cache
``workers.py``     resets and epochs; finding the request that kills the worker
``gateways.py``    leases
``control.py``     flush, abort, info, profile, drain
``status.py``      EngineStatus, server info, the invariant
``metrics.py``     counters
``snapshot.py``    the state as bytes and back (``snapshot_state.py``: what is in it)
``record.py``      the trace of every decision (``explain.py``: why somebody waits, in words)
``fakes.py``       a worker without a model, whose pages are checked: tests, simulation
=================  ===========================================================================
"""
