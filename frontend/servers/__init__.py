"""Several HTTP servers on one port, each a process, with engines that their parent owns."""
