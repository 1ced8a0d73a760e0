"""The museum: real silent bugs of distributed training, each as a script of at most 40 lines that has the bug, or has it fixed."""
