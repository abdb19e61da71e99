"""The client for asyncio. hack/pyclient.py writes package _sync from these modules, all but _stream."""
