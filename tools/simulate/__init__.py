"""The scheduler without a model: the real ``Scheduler.step``, a fake worker and a fake clock.

===============  ======================================================================
``__main__.py``  the command line: ``python -m tools.simulate``
``loop.py``      the event loop: arrivals, steps in flight, results, clients
``worker.py``    a worker that keeps the wire contract and computes nothing
``cost.py``      how long a step would have taken, from flags or fitted to a trace
``workload.py``  synthetic requests: Poisson and bursty arrivals, Zipf prefixes, conversations
``files.py``     requests from a JSONL file or a recorded trace
``measure.py``   latencies, hit rate, preemptions, pool use, fairness
``plugin.py``    policies and evictions of your own, from a file
``plot.py``      the comparison as a picture
===============  ======================================================================
"""
