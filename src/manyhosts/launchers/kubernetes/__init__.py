"""Pods of a Kubernetes job."""
