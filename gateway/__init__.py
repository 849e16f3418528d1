"""The gateway process: client connections, the protocols, one record per open request.

====================  ==========================================================================
``main.py``           the process: event loop, listening socket, drain
``server.py``         uvicorn with our bounds: connections, header time, aborting a connection
``edge.py``           what every request passes first: request id, keys, sizes, access log
``app.py``            routes, and errors as OpenAI writes them
``protocols/``        one module per protocol, all over ``OpenRequest``
``fields.py``         the generation parameters every protocol shares, and their ranges
``grammar.py``        the spellings of constrained output -> ``messages.Grammar``
``respond.py``        submit, wait for acceptance, write whole or streamed
``request.py``        ``OpenRequest`` (one rid) and ``Exchange`` (one HTTP request)
``engine.py``         the channels: submit, abort, resubmit, dispatch what arrives
``fleet.py``          which open requests a change in the engine makes us submit again
``control.py``        admin endpoints and health
``metrics.py``        histograms, and one answer from any of several gateways
====================  ==========================================================================
"""
