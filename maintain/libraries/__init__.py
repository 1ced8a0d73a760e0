"""The ladder of ddp, beside ddp.train and other libraries."""
