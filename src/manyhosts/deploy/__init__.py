"""`manyhosts deploy`: recipes and descriptions with which an export is served elsewhere.

`recipe` has the container, and what runs it on Kubernetes and Ray; `deploy` writes it and makes requests of SageMaker.
"""
