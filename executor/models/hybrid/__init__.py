"""Families with attention in some layers and recurrent layers in others."""
