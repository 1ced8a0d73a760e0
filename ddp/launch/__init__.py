"""Scripts and manifests for clusters, and a command that shows what a launcher has started."""
