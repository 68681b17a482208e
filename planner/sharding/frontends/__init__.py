"""What a user may hand the sharding compiler, as a sharding case: operators with annotations, placements, pins.

request.py      the document that the Python function sends
captured.py     a captured graph as a sharding case; placements by names of its dims
stages.py       pipeline stages of a captured graph: stated, or cut by time
decoder.py      a shipped model's decoder as a case
"""
