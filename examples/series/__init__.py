"""Forecasts of a series that comes with matplotlib, compared with linear autoregression."""
