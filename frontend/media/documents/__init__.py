"""PDF files, whose pages become images in helper processes. They need the extra `media`."""
