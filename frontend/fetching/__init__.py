"""Requests to other servers, which all go through one fetcher."""
