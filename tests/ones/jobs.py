from patrickstar.ones import Job, Throughput, TraceJob


def linear_job(name, arrival_s, gpus, duration_s, max_gpus=None, resize_s=0.0, **options):
    """Runs at 1 sample per second and GPU with any batch, for ``duration_s`` on its requested GPUs."""
    job = Job(
        name=name, arrival_s=arrival_s, min_gpus=options.pop("min_gpus", 1), max_gpus=max_gpus or gpus,
        requested_gpus=gpus, gpu_batch=1, base_batch=1, max_batch=64, epoch_samples=duration_s * gpus / 10,
        throughput=Throughput(sample_s=1.0), noise_scale=1e12, resize_s=resize_s, **options,
    )  # fmt: skip
    return TraceJob(job, samples=float(duration_s * gpus) * (1e12 + 1) / (1e12 + gpus))
