"""Requests from clients over HTTP, for either world. Both ends of a link."""
