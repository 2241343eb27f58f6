"""`manyhosts deploy`: recipes and descriptions with which an export is served elsewhere.

`recipe` has the container, `cluster` what Kubernetes and Ray are given, `aws` what SageMaker is; `deploy` writes them.
"""
