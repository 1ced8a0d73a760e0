"""Scripts and manifests for clusters; the doctor: ranks that a launcher has started, logs, dumps and messages."""
