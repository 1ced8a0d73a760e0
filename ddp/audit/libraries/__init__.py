"""One job with several libraries, as the documentation of each has it, for the table of ``python -m ddp.audit.libraries``."""
