"""The settings of TLS, towards clients and towards the engine."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field, ValidationInfo, field_validator

from highwater.files.tls import TlsFiles, check_certificate, check_pair
from highwater.policy.rules import FROZEN


class _KeyPair(BaseModel):
    """A certificate and its key: both or neither, and they must load."""

    model_config = FROZEN

    cert_file: Path | None
    key_file: Path | None

    @field_validator("cert_file", "ca_file", check_fields=False)
    @classmethod
    def _certificates(cls, value: Path | None) -> Path | None:
        if value is not None:
            check_certificate(value)
        return value

    @field_validator("key_file")
    @classmethod
    def _of_the_certificate(cls, key_file: Path | None, info: ValidationInfo) -> Path | None:
        if "cert_file" not in info.data:  # it is invalid, and reported already
            return key_file
        cert_file: Path | None = info.data["cert_file"]
        if cert_file is None and key_file is not None:
            raise ValueError("is a key without a certificate: cert_file must be given too")
        if cert_file is not None and key_file is None:
            raise ValueError(f"must be given too: the key of cert_file ({cert_file})")
        if cert_file is not None and key_file is not None:
            try:
                check_pair(cert_file, key_file)
            except ValueError as exc:
                raise ValueError(f"does not serve: {exc}") from exc
        return key_file


class TlsSettings(_KeyPair):
    """TLS towards clients."""

    cert_file: Path | None = Field(
        None, description="certificate chain to serve TLS with, PEM, read again when it changes; unset: plain HTTP"
    )
    key_file: Path | None = Field(None, validate_default=True, description="the key of cert_file, PEM, not encrypted")

    @property
    def files(self) -> TlsFiles:
        return TlsFiles(cert_file=self.cert_file, key_file=self.key_file)


class EngineTlsSettings(_KeyPair):
    """TLS towards an engine at an https URL."""

    ca_file: Path | None = Field(
        None,
        description="authorities trusted for the engine's certificate, PEM, read again when it changes; unset: the "
        "system's",
    )
    cert_file: Path | None = Field(
        None, description="certificate chain to present to the engine, PEM, read again when it changes"
    )
    key_file: Path | None = Field(None, validate_default=True, description="the key of cert_file, PEM, not encrypted")

    @property
    def files(self) -> TlsFiles:
        return TlsFiles(self.ca_file, self.cert_file, self.key_file)
