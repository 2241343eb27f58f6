"""Requests to SageMaker: a model, an endpoint, and autoscaled copies of it; checked against botocore's description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhosts.errors import ConfigError, LaunchError

_VARIANT = "all"
_DIMENSION = "sagemaker:variant:DesiredInstanceCount"


def requests(name: str, options: Mapping[str, str]) -> list[dict[str, Any]]:
    """The calls in their order: `service`, `call` and `words` of each. The image is in ECR, with the model in it."""
    least, most = int(options.get("min", "1")), int(options.get("max", "4"))
    variant = {
        "VariantName": _VARIANT,
        "ModelName": name,
        "InstanceType": options.get("instance", "ml.m5.large"),
        "InitialInstanceCount": least,
        "ContainerStartupHealthCheckTimeoutInSeconds": 600,
    }
    scaled = {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{name}/variant/{_VARIANT}",
        "ScalableDimension": _DIMENSION,
    }
    tracking = {
        "TargetValue": float(options.get("per-instance", "600")),
        "PredefinedMetricSpecification": {"PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"},
    }
    return [
        {
            "service": "sagemaker",
            "call": "create_model",
            "words": {
                "ModelName": name,
                "ExecutionRoleArn": options["role"],
                "PrimaryContainer": {"Image": options["image"]},
                "EnableNetworkIsolation": True,
            },
        },
        {
            "service": "sagemaker",
            "call": "create_endpoint_config",
            "words": {"EndpointConfigName": name, "ProductionVariants": [variant]},
        },
        {
            "service": "sagemaker",
            "call": "create_endpoint",
            "words": {"EndpointName": name, "EndpointConfigName": name},
        },
        {
            "service": "application-autoscaling",
            "call": "register_scalable_target",
            "words": {**scaled, "MinCapacity": least, "MaxCapacity": most},
        },
        {
            "service": "application-autoscaling",
            "call": "put_scaling_policy",
            "words": {
                **scaled,
                "PolicyName": name,
                "PolicyType": "TargetTrackingScaling",
                "TargetTrackingScalingPolicyConfiguration": tracking,
            },
        },
    ]


def validate(asked: list[dict[str, Any]]) -> None:
    """Hold the calls to botocore's models: names, types, lengths, patterns that it checks.

    Raises:
        ConfigError: one is not as the service wants it.
        LaunchError: botocore is not installed.
    """
    try:
        import botocore.session
        from botocore import xform_name
        from botocore.validate import ParamValidator
    except ImportError as cause:
        raise LaunchError(
            "botocore, the client of AWS, is not installed here",
            where="--to sagemaker",
            fix="in a clone of manyhosts: pip install '.[sagemaker]'",
        ) from cause
    session = botocore.session.Session()
    for each in asked:
        model = session.get_service_model(each["service"])
        operation = next(name for name in model.operation_names if xform_name(name) == each["call"])
        report = ParamValidator().validate(each["words"], model.operation_model(operation).input_shape)
        if report.has_errors():
            raise ConfigError(
                f"SageMaker would refuse {each['call']}: {report.generate_report()}",
                where="-o",
                fix="correct that option",
            )
