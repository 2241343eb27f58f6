"""Instances of a SageMaker training job."""
