"""The client for threads. hack/pyclient.py writes it from package _async, all but _stream."""
