"""Transcriptions and translations of sounds, in the form of OpenAI's API and vLLM's additions to it."""
